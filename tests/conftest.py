"""Settings that every test shares: transfer engines stay on the loopback interface."""

import os

os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("UCX_MODULES", "^efa")
