"""Memory of activations: what is kept between forward and backward, what is computed again, what moves to the host."""
