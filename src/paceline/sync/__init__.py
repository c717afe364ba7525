"""What goes over the wire: gradients in fewer bytes, with what was left behind sent later."""
