module github.com/hasplock/hasp/caslock/sqlkv

go 1.26.0

require (
	github.com/go-sql-driver/mysql v1.10.1
	github.com/hasplock/hasp v0.0.0
	github.com/hasplock/hasp/caslock v0.0.0
	github.com/mattn/go-sqlite3 v1.14.53
)

require filippo.io/edwards25519 v1.2.0 // indirect

replace github.com/hasplock/hasp => ../../

replace github.com/hasplock/hasp/caslock => ../
