"""`baton bench isolation`: the effect of prompts on running answers."""
