"""The public face of Baton: validates, tokenises, places, follows the answer, streams it. Never torch, never engine."""
