"""One request in the router: attempts, released tokens, the answer to the client, and resumption of broken streams."""
