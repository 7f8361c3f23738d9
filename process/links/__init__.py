"""Links between routers and workers: numbered, acknowledged messages over connections that break."""
