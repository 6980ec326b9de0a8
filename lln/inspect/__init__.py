"""``lln inspect``: how the attention of a Hugging Face model behaves on a text."""
