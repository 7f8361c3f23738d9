"""Placement of requests on workers. Pure; `now` is in monotonic seconds."""
