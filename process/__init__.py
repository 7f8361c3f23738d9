"""Parts that every process needs: configuration, serving, registry, errors, logs, traces. Independent of models."""
