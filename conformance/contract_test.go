package conformance

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// contract is all doc comments of package backend, as one line.
func contract(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob("../backend/*.go")
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			var doc *ast.CommentGroup
			if v := reflect.Indirect(reflect.ValueOf(n)); v.Kind() == reflect.Struct && v.FieldByName("Doc").IsValid() {
				doc = v.FieldByName("Doc").Interface().(*ast.CommentGroup)
			}
			for line := range strings.Lines(doc.Text()) {
				if !strings.HasPrefix(line, "# ") { // a heading
					text.WriteString(line)
				}
			}
			return true
		})
	}
	return strings.Join(strings.Fields(text.String()), " ")
}

// The contract says everything that the suite demands: each clause quotes a
// whole sentence of package backend, word for word.
func TestEachClauseQuotesTheContract(t *testing.T) {
	contract := contract(t)
	for _, c := range table {
		before, after, found := strings.Cut(contract, c.says)
		switch {
		case !found:
			t.Errorf("clause %s: package backend does not say %q", c.name, c.says)
		case !strings.HasSuffix(c.says, ".") || after != "" && after[0] != ' ':
			t.Errorf("clause %s: %q does not end where the sentence ends", c.name, c.says)
		case before != "" && !strings.HasSuffix(before, ". "):
			t.Errorf("clause %s: %q does not begin where the sentence begins", c.name, c.says)
		}
	}
}
