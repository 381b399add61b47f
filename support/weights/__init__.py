"""A model's files, whether it is still a GPT-2, and what it writes."""
