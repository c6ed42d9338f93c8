package crew

import (
	"fmt"
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	Main(Roles{"echo": echo})
	os.Exit(m.Run())
}

// echo sends back what it receives, twice. It also prints a line that is no message.
func echo(args []string) error {
	var text string
	for parent := Parent(); parent.Receive(&text) == nil; {
		fmt.Print("a line of ", args)
		_ = parent.Send(text + text)
	}
	return nil
}

func TestProcessAnswers(t *testing.T) {
	p := Test(t, "echo", "a", "b")
	for _, text := range []string{"a", "b\n"} {
		if err := p.Send(text); err != nil {
			t.Fatal(err)
		}
		var got string
		if err := p.Receive(&got); err != nil || got != text+text {
			t.Errorf("got %q, %v, want %q", got, err, text+text)
		}
	}
	const line = "a line of [a b]\n"
	if got := p.err.String(); got != line+line {
		t.Errorf("the log has %q", got)
	}
}

func TestEndedProcessFailsToReceive(t *testing.T) {
	p := Test(t, "echo")
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	var got string
	if err := p.Receive(&got); err == nil {
		t.Errorf("got %q from a killed process", got)
	}
}
