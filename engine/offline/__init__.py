"""Engine for use in a script, without a server. Names and fields are those of vLLM."""
