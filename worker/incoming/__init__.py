"""The edge of a worker: what other processes send is checked here, once, before anything is made of it."""
