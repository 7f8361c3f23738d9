"""What both kinds of worker share: values on the wire, pairing, pulling KV from a peer and letting peers pull."""
