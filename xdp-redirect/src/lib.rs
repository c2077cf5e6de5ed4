//! The XDP program that hands a port's packets to AF_XDP sockets, and its loader.
