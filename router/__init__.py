"""Router: accepts requests, tokenises and places them, follows their attempts and streams the answers. No torch."""
