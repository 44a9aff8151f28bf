"""The OpenAI-compatible door of treadle: chats and texts in, answers of an inference worker out."""
