"""Which workers serve a request. Pure; `now` is in monotonic seconds."""
