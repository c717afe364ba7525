"""What Horovod's frameworks have in common: exceptions, process sets, and who is who."""
