"""The common base of our processes: config, serving, registry, errors, logs, traces. No model in here."""
