"""What a decoder computes, and the weights that this asks for: by name, by place and by shard."""
