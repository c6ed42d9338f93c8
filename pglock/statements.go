package pglock

import (
	"embed"
	"strings"

	"github.com/jackc/pgx/v5"
)

//go:embed sql/*.sql
var files embed.FS

// tableName returns the name of a table in quotes. If schema is empty, the search path applies.
func tableName(schema, table string) string {
	if schema == "" {
		return pgx.Identifier{table}.Sanitize()
	}
	return pgx.Identifier{schema, table}.Sanitize()
}

// newStatements returns the SQL statements for a table, by the names of their files in the
// directory sql. Some files are fragments: other files have their names in braces, such as {pass}.
func newStatements(table string) map[string]string {
	statements := map[string]string{}
	parts := []string{"{table}", table} // pairs: a name in braces, and its text
	entries, _ := files.ReadDir("sql")
	for _, entry := range entries {
		b, err := files.ReadFile("sql/" + entry.Name())
		if err != nil {
			panic(err) // the file is missing in the package
		}
		name := strings.TrimSuffix(entry.Name(), ".sql")
		statements[name] = withoutComments(string(b))
		parts = append(parts, "{"+name+"}", statements[name])
	}

	fill := strings.NewReplacer(parts...)
	for name, text := range statements {
		// Fill in three times, because fragments use fragments, up to a depth of three.
		statements[name] = fill.Replace(fill.Replace(fill.Replace(text)))
	}
	return statements
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
