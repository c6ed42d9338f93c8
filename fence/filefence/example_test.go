package filefence_test

import (
	"context"
	"log"
	"os"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/fence/filefence"
)

func ExampleDo() {
	var locks hasp.Locker // of any strategy
	err := hasp.Do(context.Background(), locks, "report", func(ctx context.Context, _ *hasp.Lease) error {
		return filefence.Do(ctx, "/srv/report", func(context.Context) error {
			return os.WriteFile("/srv/report", []byte("42"), 0o600)
		})
	}, hasp.WithFence())
	if err != nil {
		log.Print(err)
	}
}
