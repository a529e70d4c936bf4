"""What the tests with the real vLLM need: engines as processes, hand-overs between them, what they did, and what breaks them."""
