"""A KV connector for vLLM 0.32 that moves caches with pdkv.

    vllm serve ... --kv-transfer-config '{"kv_connector": "PdkvConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "pdkv_vllm.connector"}'

`connector` is what vLLM loads, and with `vllm_api` the only module that knows vLLM. It has two
halves that meet only in `messages`: `scheduler` (rooms, attempts, which pages), and `worker` (one
pdkv node and its two endpoints). `layout` reads what a cache is from the tensors.
"""
