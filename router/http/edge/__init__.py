"""HTTP itself: connections, bodies, replies, errors."""
