"""One model on several ranks (processes): rank 0 decides and says what is to be done, the others do it, too."""
