"""What HTTP clients send, as pydantic models: unknown fields are ignored, wrong types refused."""
