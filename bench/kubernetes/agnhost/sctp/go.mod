module github.com/ishidawataru/sctp

go 1.24
