"""The simulator: a training step as the emitted program runs it, with what is sent beside what is computed."""
