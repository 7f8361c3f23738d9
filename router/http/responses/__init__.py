"""OpenAI's Responses protocol: what its clients send, what they read, and what is kept between their turns."""
