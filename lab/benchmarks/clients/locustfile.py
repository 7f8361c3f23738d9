"""Behaviour of locust's users: chats, completions and streams, some of which are cancelled."""

import random

from locust import HttpUser, between, task


class Talker(HttpUser):
    wait_time = between(0.0, 0.2)

    @task(3)
    def chat(self) -> None:
        said = [{"role": "user", "content": f"What is {random.randrange(1000)}?"}]
        self.client.post("/v1/chat/completions", json={"messages": said, "max_tokens": random.randrange(1, 24)})

    @task(3)
    def stream(self) -> None:
        body = {"prompt": "word " * random.randrange(1, 200), "max_tokens": 24, "stream": True, "ignore_eos": True}
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as response:
            last = b""
            for line in response.iter_lines():
                last = line or last
            if last != b"data: [DONE]":
                response.failure(f"the stream ended with {last[:100]!r}")

    @task(1)
    def give_up(self) -> None:
        body = {"prompt": "word " * 50, "max_tokens": 500, "stream": True, "ignore_eos": True}
        with self.client.post(
            "/v1/completions", json=body, stream=True, catch_response=True, name="/v1/completions (given up)"
        ) as response:
            next(response.iter_lines())
            response.close()
            response.success()

    @task(1)
    def refused(self) -> None:
        with self.client.post(
            "/v1/completions", json={"prompt": "a", "n": 1000}, catch_response=True, name="/v1/completions (refused)"
        ) as response:
            if response.status_code == 400:
                response.success()
