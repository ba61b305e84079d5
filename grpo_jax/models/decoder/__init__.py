"""The layers of the decoder, and the decoder made of them."""
