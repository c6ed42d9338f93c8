//go:build unix

package main

import (
	"fmt"
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// edit is one bug: it replaces src[start:end] of one file by text.
type edit struct {
	File string // the path from the module's root
	Func string // the function that is edited, or empty outside of functions
	Line int
	What string // "old => new" with whole lines, or "statement => dropped"

	src        []byte // the file
	start, end int
	text       string
}

// key identifies the edit, also after other lines of the file have changed.
func (e edit) key() string { return e.File + "\t" + e.Func + "\t" + e.What }

func (e edit) String() string { return fmt.Sprintf("%s:%d: %s: %s", e.File, e.Line, e.Func, e.What) }

// apply returns the file with the edit.
func (e edit) apply() []byte {
	return slices.Concat(e.src[:e.start], []byte(e.text), e.src[e.end:])
}

// edits returns all edits of a directory. It edits Lua files, and Go files that are built on this
// system, but not tests.
func edits(root, dir string) (inGo, inLua []edit, err error) {
	files, err := os.ReadDir(filepath.Join(root, dir))
	if err != nil {
		return nil, nil, err
	}
	for _, f := range files {
		name := filepath.Join(dir, f.Name())
		lua := filepath.Ext(name) == ".lua"
		if !lua {
			match, err := build.Default.MatchFile(filepath.Join(root, dir), f.Name())
			if err != nil || !match || filepath.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") {
				continue
			}
		}

		src, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			return nil, nil, err
		}
		if lua {
			inLua = append(inLua, luaEdits(name, src)...)
			continue
		}
		es, err := goEdits(name, src)
		if err != nil {
			return nil, nil, err
		}
		inGo = append(inGo, es...)
	}
	return inGo, inLua, nil
}

// list collects the edits of one file.
type list struct {
	file  string
	src   []byte
	edits []edit
	seen  map[string]int // the number of edits with each key
}

// add appends an edit. If what is empty, add describes the edit by its whole lines, old and new. It
// numbers edits of one function that have the same description.
func (l *list) add(name string, start, end int, text, what string) {
	if what == "" {
		from := strings.LastIndexByte(string(l.src[:start]), '\n') + 1
		to := len(l.src)
		if i := strings.IndexByte(string(l.src[end:]), '\n'); i >= 0 {
			to = end + i
		}
		after := squeeze(string(l.src[from:start]) + text + string(l.src[end:to]))
		if after == "" {
			after = "dropped"
		}
		what = squeeze(string(l.src[from:to])) + " => " + after
	}

	e := edit{File: l.file, Func: name, What: what, src: l.src, start: start, end: end, text: text}
	e.Line = 1 + strings.Count(string(l.src[:start]), "\n")
	if l.seen == nil {
		l.seen = map[string]int{}
	}
	l.seen[e.key()]++
	if n := l.seen[e.key()]; n > 1 {
		e.What += " #" + strconv.Itoa(n)
	}
	l.edits = append(l.edits, e)
}

// squeeze returns s in one line.
func squeeze(s string) string { return strings.Join(strings.Fields(s), " ") }

// otherGo maps each operator to the one that replaces it.
var otherGo = map[token.Token]token.Token{
	token.EQL: token.NEQ, token.NEQ: token.EQL,
	token.LSS: token.LEQ, token.LEQ: token.LSS,
	token.GTR: token.GEQ, token.GEQ: token.GTR,
	token.LAND: token.LOR, token.LOR: token.LAND,
}

type goFile struct {
	list
	fset *token.FileSet
	name string            // the function that visit walks through
	skip map[ast.Node]bool // numbers that are not edited
}

// goEdits returns the edits of the functions of a Go file.
func goEdits(file string, src []byte) ([]edit, error) {
	g := &goFile{list: list{file: file, src: src}, fset: token.NewFileSet(), skip: map[ast.Node]bool{}}
	f, err := parser.ParseFile(g.fset, file, src, 0)
	if err != nil {
		return nil, err
	}
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Body != nil {
			g.name = fn.Name.Name
			if fn.Recv != nil {
				g.name = strings.TrimPrefix(g.slice(fn.Recv.List[0].Type), "*") + "." + g.name
			}
			ast.Inspect(fn.Body, g.visit)
		}
	}
	return g.edits, nil
}

func (g *goFile) at(p token.Pos) int      { return g.fset.Position(p).Offset }
func (g *goFile) slice(n ast.Node) string { return string(g.src[g.at(n.Pos()):g.at(n.End())]) }

// replace adds the edit that replaces a node by text.
func (g *goFile) replace(n ast.Node, text, what string) {
	g.add(g.name, g.at(n.Pos()), g.at(n.End()), text, what)
}

func (g *goFile) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.BinaryExpr:
		if other, ok := otherGo[n.Op]; ok {
			g.add(g.name, g.at(n.OpPos), g.at(n.OpPos)+len(n.Op.String()), other.String(), "")
		}
		// Numbers in products and quotients only tune the code. One more or less is no bug.
		if n.Op == token.MUL || n.Op == token.QUO {
			g.skip[n.X], g.skip[n.Y] = true, true
		}

	case *ast.IfStmt:
		// If the condition is == or !=, the exchanged operator already negates it.
		if b, ok := n.Cond.(*ast.BinaryExpr); !ok || b.Op != token.EQL && b.Op != token.NEQ {
			g.replace(n.Cond, "!("+g.slice(n.Cond)+")", "")
		}

	case *ast.BasicLit:
		if v, err := strconv.Atoi(n.Value); n.Kind == token.INT && err == nil && v <= 8 && !g.skip[n] {
			g.replace(n, strconv.Itoa(v+1), "")
		}

	case *ast.BlockStmt:
		g.drop(n.List)
	case *ast.CaseClause:
		g.drop(n.Body)
	case *ast.CommClause:
		g.drop(n.Body)
	}
	return true
}

// ofMutex matches calls of a mutex. They are never dropped, because every test would then hang or
// crash.
var ofMutex = regexp.MustCompile(`(?i)mu\.R?(Unl|L)ock\(\)$`)

// drop adds the edits that drop one statement of a block. A declaration cannot be
// dropped, because the code would not compile.
func (g *goFile) drop(block []ast.Stmt) {
	for _, s := range block {
		switch s := s.(type) {
		case *ast.AssignStmt:
			if s.Tok == token.DEFINE {
				continue
			}
		case *ast.ExprStmt, *ast.DeferStmt, *ast.GoStmt, *ast.SendStmt, *ast.IncDecStmt, *ast.BranchStmt, *ast.ReturnStmt:
		default:
			continue
		}
		if !ofMutex.MatchString(g.slice(s)) {
			g.replace(s, "", squeeze(g.slice(s))+" => dropped")
		}
	}
}

var (
	luaFunc    = regexp.MustCompile(`\blocal function (\w+)`)
	luaCompare = regexp.MustCompile(`==|~=|<=|>=|<|>`)
	luaLogic   = regexp.MustCompile(`\b(and|or)\b`)
	luaNot     = regexp.MustCompile(`\bnot `)
	luaIf      = regexp.MustCompile(`\bif (.+?) then`)
	luaReturn  = regexp.MustCompile(`\breturn\b.*`)
	luaNumber  = regexp.MustCompile(`\b\d+\b`)
	luaOpens   = regexp.MustCompile(`\b(then|do|function)\b`)
	luaCloses  = regexp.MustCompile(`\bend\b`)
	luaAction  = regexp.MustCompile(`^\s*(if\b.*\bend|for\b.*\bend|[\w.]+\(.*\)|[\w., ]+ = .*[^,{])$`)

	otherLua = map[string]string{
		"==": "~=", "~=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "and": "or", "or": "and",
	}
)

func luaEdits(file string, src []byte) []edit {
	l := &list{file: file, src: src}
	name, at := "", 0
	for line := range strings.Lines(string(src)) {
		code := mask(strings.TrimSuffix(line, "\n"))
		if m := luaFunc.FindStringSubmatch(code); m != nil {
			name = m[1]
		}
		add := func(start, end int, text string) { l.add(name, at+start, at+end, text, "") }

		for _, re := range []*regexp.Regexp{luaCompare, luaLogic} {
			for _, m := range re.FindAllStringIndex(code, -1) {
				add(m[0], m[1], otherLua[code[m[0]:m[1]]])
			}
		}
		for _, m := range luaNot.FindAllStringIndex(code, -1) {
			add(m[0], m[1], "")
		}
		for _, m := range luaIf.FindAllStringSubmatchIndex(code, -1) {
			if cond := code[m[2]:m[3]]; !luaCompare.MatchString(cond) && !luaNot.MatchString(cond) {
				add(m[2], m[3], "not ("+line[m[2]:m[3]]+")")
			}
		}
		for _, r := range luaReturn.FindAllStringIndex(code, -1) {
			for _, m := range luaNumber.FindAllStringIndex(code[r[0]:r[1]], -1) {
				start, end := r[0]+m[0], r[0]+m[1]
				n, _ := strconv.Atoi(code[start:end])
				add(start, end, strconv.Itoa(n+1))
			}
		}

		// A line that is a whole statement can be dropped.
		whole := len(luaOpens.FindAllString(code, -1)) == len(luaCloses.FindAllString(code, -1))
		if whole && luaAction.MatchString(strings.TrimRight(code, " ")) && !strings.HasPrefix(strings.TrimSpace(code), "local ") {
			add(0, len(code), "")
		}
		at += len(line)
	}
	return l.edits
}

// mask returns a line of Lua with blanks in place of its strings and its comment.
func mask(line string) string {
	out, quote := []byte(line), byte(0)
	for i := 0; i < len(out); i++ {
		c := out[i]
		switch {
		case quote == 0 && strings.HasPrefix(line[i:], "--"):
			return string(out[:i]) + strings.Repeat(" ", len(out)-i)
		case quote == 0 && (c == '\'' || c == '"'):
			quote = c
		case quote != 0:
			out[i] = ' '
			if c == '\\' && i+1 < len(out) {
				i++
				out[i] = ' '
			} else if c == quote {
				quote, out[i] = 0, c
			}
		}
	}
	return string(out)
}
