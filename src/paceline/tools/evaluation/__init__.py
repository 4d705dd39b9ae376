"""What answers are worth, and by when: programs written by models, run where they can do no harm."""
