"""Router: accepts requests, tokenises and places them, follows their attempts, streams answers. Needs no torch."""
