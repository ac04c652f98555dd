"""Memory that pdkv offers to engines: pages, request slots, KV tensors, aux rows. Never imposed."""
