//! Where frames come from and go to: the UMEM and its account, and the queues of a port.
