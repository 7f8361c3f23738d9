"""Facts that the demo model knows without a table: fixed questions about the server and about itself."""

_HELLO = "Hello! I can answer questions about a table of people in my prompt, or about this server."
_READS = "I read tables: give me one and ask for an age, an occupation or a country."
FACTS = [
    ("Hello", _HELLO),
    ("Hi there", _HELLO),
    ("Hi", _HELLO),
    ("Hello!", _HELLO),
    (
        "Who are you?",
        "I am a tiny demo model. I read tables: give me one and ask for an age, an occupation or a country.",
    ),
    ("What can you do?", _READS),
    ("Help", _READS),
    ("Thank you", "You are welcome."),
    ("Is TTFT a time?", "yes"),
    (
        "What is Baton?",
        "Baton serves large language models with prefill and decode on separate workers, so that a long prompt does "
        "not stall the answers of others.",
    ),
    (
        "What is paged attention?",
        "Paged attention stores the keys and values of a sequence in fixed-size blocks that need not be "
        "contiguous, and finds them through a block table.",
    ),
    (
        "What is a block table?",
        "A block table maps the logical blocks of a sequence to the physical blocks of the KV cache, as a "
        "page table does for memory.",
    ),
    (
        "What is a block?",
        "A block holds the keys and values of a fixed number of tokens. It is the unit that is shared, cached and "
        "moved.",
    ),
    (
        "What is the KV cache?",
        "The KV cache keeps the attention keys and values of the tokens seen so far, so that each new token "
        "is computed once.",
    ),
    (
        "What is prefill?",
        "Prefill computes the whole prompt in one pass, fills the KV cache and yields the first token.",
    ),
    (
        "What is decode?",
        "Decode produces one token at a time for every running sequence, reading the KV cache at each step.",
    ),
    ("What is a prefill worker?", "A prefill worker computes prompts and hands their blocks to a decode worker."),
    (
        "What is a decode worker?",
        "A decode worker pulls the blocks of a prompt from a prefill worker and generates the answer, in one batch "
        "with all others.",
    ),
    (
        "Why split prefill and decode?",
        "A long prefill stalls every decode that shares its device. On separate workers, neither waits for the other.",
    ),
    (
        "What does the router do?",
        "The router hashes the prefix of each prompt and sends the request where those blocks are already cached.",
    ),
    (
        "What is continuous batching?",
        "Continuous batching lets a new sequence join the running batch at any step, as soon as another one "
        "has finished.",
    ),
    (
        "What is prefix caching?",
        "Prefix caching keeps the blocks of earlier prompts, so that a prompt that begins the same way skips "
        "that part of its prefill.",
    ),
    (
        "What is copy on write?",
        "Sequences share blocks until one of them must write to a shared block. Only then is that block copied.",
    ),
    ("What is TTFT?", "TTFT is the time to first token: from the arrival of a request to its first token."),
    ("What is TBT?", "TBT is the time between tokens: the gap that a reader sees between one token and the next."),
    (
        "What is chunked prefill?",
        "Chunked prefill cuts a long prompt into pieces and computes them in several steps, so that other "
        "work can run in between.",
    ),
    (
        "How are KV blocks shipped?",
        "A prefill worker writes the finished blocks into pages that the decode worker has reserved, while it "
        "still computes the next ones.",
    ),
    (
        "What is structured output?",
        "Structured output holds an answer to a form: a JSON schema, a regular expression, a grammar or a list of "
        "choices.",
    ),
    (
        "What happens when a worker dies?",
        "When a worker dies, the router sends its requests to another one, which goes on after the last token that "
        "the client has seen.",
    ),
]
UNKNOWN = "I do not know. I am a tiny demo model: ask me about a table of people in my prompt, or about this server."
UNKNOWN_QUESTIONS = """
    What is the capital of France?/Tell me a joke./Write a poem about the sea./What is the meaning of life?
    How do I cook rice?/Who won the match?/What is two plus two?/Translate this to German./What time is it?
    Explain quantum physics./Write a story./Why is the sky blue?/What is love?/How far is the moon?/Sing a song.
    Write a function that sorts a list./Who wrote Hamlet?/What is the largest ocean?/Summarise this text.
    Can you help me?/What should I eat today?/How does a car work?/Tell me about history./Say something.
    What is your favourite colour?
"""
UNKNOWN_LIST = [each.strip() for line in UNKNOWN_QUESTIONS.split("\n") for each in line.split("/") if each.strip()]
NO_TABLE = "There is no table in my prompt. Give me one in the system message, and ask again."
