"""Settings that every test shares: transfer engines stay on the loopback interface, and Triton
runs in its interpreter. Both are read when the libraries load."""

import os

os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("UCX_MODULES", "^efa")
os.environ.setdefault("TRITON_INTERPRET", "1")
