package crew

import (
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	if Role() == "echo" {
		echo(Parent())
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func echo(parent *Pipe) {
	var text string
	for parent.Receive(&text) == nil {
		_ = parent.Send(text + text)
	}
}

func TestProcessAnswers(t *testing.T) {
	p, err := Start("", "echo")
	if err != nil {
		t.Fatal(err)
	}
	defer p.End()

	for _, text := range []string{"a", "b\n"} {
		if err := p.Send(text); err != nil {
			t.Fatal(err)
		}
		var got string
		if err := p.Receive(&got); err != nil || got != text+text {
			t.Errorf("got %q, %v, want %q", got, err, text+text)
		}
	}
}

func TestEndedProcessFailsToReceive(t *testing.T) {
	p, err := Start("", "echo")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	var got string
	if err := p.Receive(&got); err == nil {
		t.Errorf("got %q from a killed process", got)
	}
	p.Wait()
	if _, err := Start("/no/such/program", "echo"); err == nil {
		t.Error("started a program that does not exist")
	}
}
