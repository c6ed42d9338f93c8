// Package api checks that the exported API is what api.txt says, so that no change of the API goes
// unnoticed.
package api

import (
	"bytes"
	"flag"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hasplock/hasp/internal/await"
)

var update = flag.Bool("update", false, "write api.txt")

const root = "../.."

var positions = token.NewFileSet()

func TestAPI(t *testing.T) {
	got := exported(t)
	file := filepath.Join(root, "api.txt")
	if *update {
		await.Must(t, os.WriteFile(file, got, 0o644))
		return
	}
	want := await.Value(os.ReadFile(file))
	if bytes.Equal(got, want) {
		return
	}
	gotLines := strings.Split(string(got), "\n")
	wantLines := strings.Split(string(want), "\n")
	for _, l := range gotLines {
		if !slices.Contains(wantLines, l) {
			t.Errorf("new:  %s", l)
		}
	}
	for _, l := range wantLines {
		if !slices.Contains(gotLines, l) {
			t.Errorf("gone: %s", l)
		}
	}
	t.Error("the exported API differs from api.txt; if that is meant, run: make api.txt")
}

// exported returns the exported declarations of all packages that others can import, as sorted
// lines.
func exported(t *testing.T) []byte {
	var lines []string
	sources(t, func(f *ast.File) {
		ast.FileExports(f)
		for _, decl := range f.Decls {
			for _, l := range declared(decl) {
				lines = append(lines, f.Name.Name+": "+l)
			}
		}
	}, "testdata", "internal", "cmd", "lab")
	slices.Sort(lines)
	return []byte(strings.Join(slices.Compact(lines), "\n") + "\n")
}

// sources calls f for each Go file of the repository that is no test. It leaves out the directories
// whose name is in without.
func sources(t *testing.T, f func(file *ast.File), without ...string) {
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		out := strings.HasPrefix(name, ".") || slices.Contains(without, name)
		if d.IsDir() && path != root && out {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(positions, path, nil, 0)
		if err == nil {
			f(file)
		}
		return err
	})
	await.Must(t, err)
}

// declared returns each thing that decl declares, as one line.
func declared(decl ast.Decl) []string {
	var nodes []any
	keyword := ""
	switch d := decl.(type) {
	case *ast.FuncDecl:
		if d.Recv != nil && !ast.IsExported(receiver(d.Recv.List[0].Type)) {
			return nil
		}
		d.Body = nil
		nodes = append(nodes, d)
	case *ast.GenDecl:
		keyword = d.Tok.String() + " "
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.ValueSpec:
				for _, n := range s.Names {
					one := &ast.ValueSpec{Names: []*ast.Ident{n}, Type: s.Type}
					if d.Tok == token.CONST && len(s.Names) == 1 {
						one.Values = s.Values
					}
					nodes = append(nodes, one)
				}
			case *ast.TypeSpec:
				nodes = append(nodes, s)
			}
		}
	}
	var out []string
	for _, n := range nodes {
		var b bytes.Buffer
		printer.Fprint(&b, positions, n)
		out = append(out, keyword+strings.Join(strings.Fields(b.String()), " "))
	}
	return out
}

// receiver returns the name of the type in a method's receiver.
func receiver(x ast.Expr) string {
	switch x := x.(type) {
	case *ast.StarExpr:
		return receiver(x.X)
	case *ast.IndexExpr:
		return receiver(x.X)
	case *ast.Ident:
		return x.Name
	}
	return ""
}
