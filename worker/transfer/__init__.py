"""KV transfers on the wire: Protobuf stops here."""
