"""What it takes to be one of our processes: config, serving, registry, errors, logs, traces. No model in here."""
