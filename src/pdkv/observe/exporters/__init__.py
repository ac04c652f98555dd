"""Ways out of a recorder: Prometheus, structured logs, OpenTelemetry. None of them runs where a
node runs, so one that fails or blocks touches nothing but itself."""
