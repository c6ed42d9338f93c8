// Package election tests package k8slease with the leader election of client-go. It is a module of
// its own, so that caslock does not depend on client-go.
package election
