package pglock

import (
	"embed"
	"strings"

	"github.com/jackc/pgx/v5"
)

//go:embed sql/*.sql
var files embed.FS

// statements contains the SQL statements for one table, from the files in the directory sql.
type statements struct {
	name string // the name of the table, in quotes

	table                   string
	take, join, blocked     string
	renew, renewShared      string
	release, leave, quit    string
	breakKey, inspect, list string
	sweep                   string
}

// fragments are the files whose text other files use, such as {pass}.
var fragments = []string{
	"present", "barred", "settled", "ahead", "leaves", "enters", "pass", "passes", "entry",
}

// newStatements returns the statements for a table. If schema is empty, the search path applies.
func newStatements(schema, table string) *statements {
	name := pgx.Identifier{table}.Sanitize()
	if schema != "" {
		name = pgx.Identifier{schema, table}.Sanitize()
	}
	read := func(file string) string {
		b, err := files.ReadFile("sql/" + file + ".sql")
		if err != nil {
			panic(err) // the file is missing in the package
		}
		return withoutComments(string(b))
	}

	parts := []string{"{table}", name}
	for _, file := range fragments {
		parts = append(parts, "{"+file+"}", read(file))
	}
	for _, channel := range []string{"$2", "$3", "$4"} {
		wake := strings.ReplaceAll(read("wake"), "{channel}", channel)
		parts = append(parts, "{wake "+channel+"}", wake)
	}
	fill := strings.NewReplacer(parts...)

	// Fill in twice, because fragments use fragments.
	text := func(file string) string { return fill.Replace(fill.Replace(read(file))) }
	return &statements{
		name:  name,
		table: text("table"),

		take:    text("take"),
		join:    text("join"),
		blocked: text("blocked"),

		renew:       text("renew"),
		renewShared: text("renewshared"),

		release: text("release"),
		leave:   text("leave"),
		quit:    text("quit"),

		breakKey: text("break"),
		inspect:  text("inspect"),
		list:     text("list"),
		sweep:    text("sweep"),
	}
}

// withoutComments removes the comments, so that they are not sent. Two dashes always begin a
// comment, because no string in the files contains them.
func withoutComments(sql string) string {
	var b strings.Builder
	for line := range strings.Lines(sql) {
		if code, _, _ := strings.Cut(line, "--"); strings.TrimSpace(code) != "" {
			b.WriteString(strings.TrimRight(code, " \n"))
			b.WriteByte('\n')
		}
	}

	return strings.TrimSpace(b.String())
}
