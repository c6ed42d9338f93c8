package main

import (
	"cmp"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(a.out, "hasp", version())
			return err
		},
	}
}

// version returns the versions of the module, with the commit where the build
// knows it, and of Go, and the platform.
func version() string {
	module := ""
	if info, ok := debug.ReadBuildInfo(); ok {
		module = info.Main.Version
	}
	return fmt.Sprintf("%s %s %s/%s", cmp.Or(module, "(devel)"), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
