"""What a decoder computes, the weights that it asks for, and where each of them is stored."""
