"""`baton bench serve`: a service under load, Baton's or any with OpenAI's completions."""
