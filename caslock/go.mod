module github.com/hasplock/hasp/caslock

go 1.26.0

require github.com/hasplock/hasp v0.0.0

replace github.com/hasplock/hasp => ../
