"""The common part of both kinds of worker: values on the wire, pairing, pulling KV and letting peers pull."""
