"""HTTP layer, independent of the APIs: server, connections, access, bodies, replies and errors."""
