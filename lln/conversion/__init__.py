"""``lln convert``: how good a converted Hugging Face model is, beside the one it was made from."""
